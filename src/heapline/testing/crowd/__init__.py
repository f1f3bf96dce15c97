"""The simulator of a crowd: many real managers in virtual time, on a store and in processes that misbehave."""
