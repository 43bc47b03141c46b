"""What faces the outside: the gRPC service, text (tokenizer and chat template), metrics, and ``main``."""
