import pytest
from hands import Hands

from brokers.store import Store


@pytest.fixture
def hands(store: Store) -> Hands:
    return Hands(store)
