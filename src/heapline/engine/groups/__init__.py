"""Consumer groups: pages of stream rows, and the groups that receive them."""
