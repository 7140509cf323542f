"""The remote driver: learners and syncer as processes, gRPC between them."""
