"""Formats that server and client share: commands in msgpack, protobuf and JSON, errors as codes, native connections."""
