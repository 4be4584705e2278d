"""A router policy in plain Python, for the figure about such policies."""

from simcluster.request import Request
from simcluster.routers import ClusterView, RouterSettings

__all__ = ["FewestResident"]


class FewestResident:
    """The instance with the fewest waiting and running requests."""

    def __init__(self, settings: RouterSettings) -> None:
        self._indices = range(settings.num_instances)

    def route(self, request: Request, view: ClusterView) -> int:  # noqa: ARG002  (a policy may look at it)
        """Choose an instance."""
        resident = view.num_resident().tolist()
        return min(self._indices, key=resident.__getitem__)
