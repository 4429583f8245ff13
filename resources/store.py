"""The artifact store as a Dagster resource."""

from dagster import ConfigurableResource
from pydantic import Field

from llm_assets.places import store_url
from llm_assets.store import open_store
from llm_assets.store.protocol import Store


class StoreResource(ConfigurableResource):
    """Opens the store that a URL names; without one, `$LLM_ASSETS_STORE` or the project's own."""

    url: str = Field("", description="A folder, or s3://bucket/prefix.")

    def open(self) -> Store:
        """The store."""
        return open_store(self.url or store_url())
