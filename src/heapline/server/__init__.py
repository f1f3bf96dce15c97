"""The interfaces of a broker on the network, and who may use them."""
