"""What server and client share: the messages of proto/, batches as columns, and errors as codes. Knows no sockets."""
