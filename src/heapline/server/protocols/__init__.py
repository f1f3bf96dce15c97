"""The interfaces of a server: native, gRPC, HTTP and MQueue. Each turns requests into commands for the dispatcher."""
