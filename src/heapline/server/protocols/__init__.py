"""The interfaces of a server: gRPC, HTTP and MQueue's API. Each turns its requests into commands for the dispatcher."""
