"""llm-assets: language-model pipelines as Dagster assets."""

__version__ = "0.1.0"
