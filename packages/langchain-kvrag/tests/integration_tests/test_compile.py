import pytest


@pytest.mark.compile
def test_placeholder():
    """LangChain's CI runs it to see that the integration tests can be imported."""
