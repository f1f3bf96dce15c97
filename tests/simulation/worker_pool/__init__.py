"""Simulator of a worker pool: many real managers in virtual time, on a store and in processes that misbehave."""
