"""TTFTs that estimators predicted for requests through a live router, against what was observed, as one table."""

from collections.abc import Sequence

import polars as pl

from live_traffic import Got
from simcluster.calibrate.recording import Recording
from simcluster.card import Card
from simcluster.live.router.outcome import Outcome
from simcluster.validate.estimators import compare_estimators
from simcluster.validate.scheduling import replay_scheduling
from simcluster.validate.simulate import Tuning

__all__ = ["offline_errors", "online_errors", "shown", "summarized"]


def online_errors(gots: Sequence[Got], outcomes: Sequence[Outcome], beside: Sequence[str]) -> pl.DataFrame:
    """Score what the router said before it sent a request against the client's TTFT; errors [s]."""
    made_of = {each.request_id: each.made for each in outcomes}
    rows = []
    for got in gots:
        made = made_of[got.ask.key]
        assert made is not None
        said = {"sfs": got.predicted_ttft_s, **dict(zip(beside, made.beside, strict=True))}
        rows += [(got.instance, "online", name, got.ttft_s, value) for name, value in said.items()]
    names = ("instance", "how", "estimator", "observed_s", "predicted_s")
    return _with_errors(pl.DataFrame(rows, schema=names, orient="row"))


def offline_errors(card: Card, recording: Recording, gots: Sequence[Got]) -> pl.DataFrame:
    """Score SFS with measured and with the card's step times, eq. 6 and LPS at each arrival of a recording; errors [s].

    Once against the engine's TTFT, once against the client's, which has the way there and back in it as well. The rates
    of eq. 6 and LPS are those of the recording itself, not the card's, whose requests were others.
    """
    card = card.model_copy(update={"service_rates": None})
    scored = compare_estimators(card, recording, replay_scheduling(recording), Tuning())
    assert scored is not None, "the scheduler, running free, repeats the recording"
    client = pl.DataFrame(
        {"key": [each.ask.engine_key for each in gots], "client_s": [each.ttft_s for each in gots]},
        schema={"key": pl.String, "client_s": pl.Float64},
    )
    points = scored[1].with_columns(key=pl.col("request_id").str.replace(r"-[0-9a-f]{8}$", ""))
    points = points.join(client, on="key", how="inner", validate="m:1").with_columns(instance=pl.lit(card.model))
    engine = points.with_columns(how=pl.lit("offline, engine"))
    whole = points.with_columns(how=pl.lit("offline, client"), observed_s=pl.col("client_s"))
    names = ("instance", "how", "estimator", "observed_s", "predicted_s")
    return _with_errors(pl.concat([engine, whole]).select(names))


def _with_errors(table: pl.DataFrame) -> pl.DataFrame:
    """Add errors; that of a TTFT without bound, as LPS has it for more than an instance can serve, is infinite."""
    error = (pl.col("predicted_s") - pl.col("observed_s")).abs()
    return table.with_columns(error_s=error.fill_null(float("inf")))


def summarized(errors: pl.DataFrame) -> pl.DataFrame:
    """Return count and median errors by instance, way of scoring and estimator."""
    share = pl.col("error_s") / pl.col("observed_s")
    return errors.group_by("instance", "how", "estimator", maintain_order=True).agg(
        count=pl.len(),
        not_predicted=pl.col("predicted_s").is_null().sum() + pl.col("predicted_s").is_infinite().sum(),
        observed_ms=1e3 * pl.col("observed_s").median(),
        median_ms=1e3 * pl.col("error_s").median(),
        p90_ms=1e3 * pl.col("error_s").quantile(0.9),
        median_share=share.median(),
        bias_ms=1e3 * (pl.col("predicted_s") - pl.col("observed_s")).median(),
    )


def shown(table: pl.DataFrame) -> str:
    """Return the whole table as text."""
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=200, float_precision=3, tbl_hide_dataframe_shape=True):
        return str(table)
