"""What a live router knows by itself: the requests that it sent and that have not ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.request import Request

__all__ = ["OwnRequest", "OwnRequests"]


@dataclass(slots=True)
class OwnRequest:
    """A request on its way.

    Attributes:
        id: its number in snapshots.
        prompt_tokens: by the instance's tokenizer [tokens].
        predicted_output: expected answer length [tokens].
        max_tokens: the client's limit [tokens]; -1 where not given.
        priority: smaller is served earlier.
        arrival_ps: arrival at the router [ps].
        at_ps: when it reaches the engine [ps].
        tokens: tokens of the answer that have come.
    """

    id: int
    prompt_tokens: int
    predicted_output: int
    max_tokens: int
    priority: int
    arrival_ps: int
    at_ps: int
    tokens: int = 0


class OwnRequests:
    """The open requests of each instance, and the views that are told of them.

    Attributes:
        open: (j,) by id, in order of dispatch.
        num_events: (j,) dispatches, first tokens and ends so far.
    """

    def __init__(self, instances: Sequence[InstanceSpec]) -> None:
        self.open: list[dict[int, OwnRequest]] = [{} for _ in instances]
        self.num_events = [0] * len(instances)
        self._instances = instances

    def __len__(self) -> int:
        return sum(map(len, self.open))

    def sent(self, request: Request, instance: int, sent_ps: int, view: _native.InstanceView) -> OwnRequest:
        """Note a request that leaves for an instance at an instant [ps]."""
        prompt_tokens = int(request.prompt_tokens[instance])
        own = OwnRequest(
            request.index,
            prompt_tokens,
            int(request.predicted_output_tokens[instance]),
            request.max_tokens,
            request.priority,
            request.arrival_ps,
            self._instances[instance].engine_arrival_ps(sent_ps, prompt_tokens),
        )
        self.resume(instance, own, view)
        return own

    def resume(self, instance: int, own: OwnRequest, view: _native.InstanceView) -> None:
        """Note a request that was sent before anybody took note here."""
        self.open[instance][own.id] = own
        self.num_events[instance] += 1
        _record(view, own)

    def first_token(self, id: int, instance: int) -> None:  # noqa: A002
        """Note that the first token of a request has come."""
        own = self.open[instance].get(id)
        if own is not None:
            own.tokens = max(own.tokens, 1)
            self.num_events[instance] += 1

    def ended(self, id: int, instance: int, view: _native.InstanceView) -> bool:  # noqa: A002
        """Note that a request has ended or never arrived; False if it was not open."""
        if self.open[instance].pop(id, None) is None:
            return False
        self.num_events[instance] += 1
        view.forget_dispatch(id)
        return True

    def tell_again(self, instance: int, view: _native.InstanceView) -> None:
        """Tell a view of every open request anew, since the next snapshot comes from elsewhere than the last."""
        for own in self.open[instance].values():
            view.forget_dispatch(own.id)
            _record(view, own)


def _record(view: _native.InstanceView, own: OwnRequest) -> None:
    view.record_dispatch(
        own.id,
        own.prompt_tokens,
        own.predicted_output,
        own.at_ps,
        own.max_tokens,
        priority=own.priority,
        arrival_time=own.arrival_ps,
    )
