"""What a plan cannot answer."""


class PlanError(ValueError):
    """A topology, a config or a compiler that gives no plan."""
