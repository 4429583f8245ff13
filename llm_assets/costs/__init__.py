"""What a stage will cost, what it has cost, and whether it may start. No torch, no Dagster.

    quantities   7B, 2T, 2.50 USD an hour: parsed and shown
    devices      peak throughput and memory, each with its source
    parameters   exact parameter counts of an architecture
    estimate     floating-point operations, hours and USD from first principles
    work         what each stage of a recipe has to compute
    expected     what is known of a stage's inputs before they exist
    learning     estimates corrected by earlier records
    forecast     the estimates of a rerun set, from recipe, store and records
    memory       what a stage needs on each device
    entries      the ledger's documents, and reading them
    ledger       writing them: the money spent, one attempt at a time
    report       the ledger summed by run, stage, pipeline, campaign or day
    budget       limits, and the check before a stage starts
    reservations money set aside, so that no two runs spend the same
    meter        spending followed while a stage runs
    energy       joules, where the machine counts them
    commands     `llm-assets estimate`, `costs` and `budget`

docs/costs.md tells the whole.
"""
