"""The half that computes: a Batch in, a BatchResult out. It knows nothing of requests, queues or text."""
