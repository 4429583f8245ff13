"""Reading user data: forms, files, problems, mixing. No torch, no Dagster."""
