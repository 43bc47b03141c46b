"""Device kernels, one folder an operation: ``api`` (the signature), ``reference`` (the readable twin), backends."""
