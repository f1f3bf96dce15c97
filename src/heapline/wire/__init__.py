"""The formats that server and client share: commands and results as protobuf and JSON, errors as codes. No sockets."""
