"""The same programs as in the integration tests."""

from tests.integration.conftest import programs

__all__ = ["programs"]
