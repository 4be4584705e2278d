"""Arrival processes against their closed forms, and traces drawn from files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from simcluster.errors import ConfigError, SimclusterError, TraceError
from simcluster.experiment.build import build_world
from simcluster.rng import Stream, generator
from simcluster.scenario import Scenario, load_scenario
from simcluster.workload import Trace, read_trace, write_trace
from simcluster.workload.arrivals import constant_arrivals_ns, gamma_arrivals_ns, mmpp2_arrivals_ns, mmpp2_rates
from simcluster.workload.importing import ImportOptions, import_trace
from simcluster.workload.recipe import Recipe, load_recipe
from simcluster.workload.servegen import draw_arrivals, read_lengths, read_rates
from simcluster.workload.synth import make_trace
from trace_files import FILES

TWO = {"kind": "drawn", "prompt": {"median": 2, "sigma": 0}, "answer": {"median": 2, "sigma": 0}}


def made(**parts: Any) -> Trace:
    base: dict[str, Any] = {"name": "t", "seed": 7, "lengths": TWO}
    return make_trace(Recipe.model_validate({key: part for key, part in (base | parts).items() if part is not None}))


# ---- gamma, constant -----------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "scale_s", "cv"), [(0.25, 1, 2), (1, 0.25, 1), (4, 0.0625, 0.5)])
def test_burstiness_keeps_the_mean_rate(shape: float, scale_s: float, cv: float) -> None:
    # C041
    n = 100_000
    gaps_s = np.diff(gamma_arrivals_ns(4.0, shape, n, generator(1, Stream.ARRIVALS)), prepend=0) / 1e9
    assert gaps_s.mean() == pytest.approx(0.25, abs=4 * 0.25 * cv / math.sqrt(n))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03)
    assert stats.kstest(gaps_s, "gamma", args=(shape, 0, scale_s)).pvalue > 0.01


@pytest.mark.parametrize("shape", [0.0, -1.0, float("nan"), float("inf")])
def test_a_burstiness_of_0_or_less_is_refused(shape: float) -> None:
    # C041
    with pytest.raises(ConfigError, match="burstiness = "):
        gamma_arrivals_ns(4.0, shape, 3, generator(1, Stream.ARRIVALS))
    with pytest.raises(ValueError, match="burstiness"):
        made(requests=3, arrivals={"kind": "gamma", "rate_rps": 4.0, "burstiness": shape})


def test_a_recipe_draws_gamma_arrivals() -> None:
    # C041
    trace = made(requests=500, arrivals={"kind": "gamma", "rate_rps": 4.0, "burstiness": 0.25})
    expected = gamma_arrivals_ns(4.0, 0.25, 500, generator(7, Stream.ARRIVALS))
    assert np.array_equal(trace.arrival_ns, expected)


def test_constant_arrivals_start_at_0_and_have_equal_gaps() -> None:
    assert constant_arrivals_ns(4.0, 4).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert made(requests=3, arrivals={"kind": "constant", "rate_rps": 0.5}).arrival_ns.tolist() == [
        0,
        2 * 10**9,
        4 * 10**9,
    ]


# ---- MMPP-2 --------------------------------------------------------------------------------------


def test_the_two_levels_are_those_of_the_paper() -> None:
    for mean in (6.0, 7.0, 8.0):
        for ratio in (3.0, 6.0):
            rates, stays_s = mmpp2_rates(mean, ratio, 0.2, 2.0)
            assert rates[0] == pytest.approx(mean / (0.8 + 0.2 * ratio))
            assert rates[1] == pytest.approx(ratio * rates[0])
            assert 0.8 * rates[0] + 0.2 * rates[1] == pytest.approx(mean)
            assert (1 / stays_s).tolist() == pytest.approx([0.1, 0.4])


def mmpp2(n: int, ratio: float, seed: int = 1) -> np.ndarray[Any, Any]:
    streams = (generator(seed, Stream.ARRIVALS), generator(seed, Stream.STATES))
    return mmpp2_arrivals_ns(7.0, ratio, 0.2, 2.0, n, *streams)


def test_counts_of_an_mmpp2_have_the_mean_and_the_dispersion_of_the_closed_form() -> None:
    arrivals_s = mmpp2(300_000, 6.0) / 1e9
    for window_s in (1.0, 10.0):
        windows = int(arrivals_s[-1] / window_s)
        counts = np.bincount((arrivals_s / window_s).astype(int), minlength=windows)[:windows]
        # Variance over mean of the counts of a stationary MMPP-2 (Fischer and Meier-Hellstern 1993).
        rates, stays_s = mmpp2_rates(7.0, 6.0, 0.2, 2.0)
        leave = 1 / stays_s
        both = leave.sum()
        share = leave[0] * leave[1] / both**2
        grown = 1 - (1 - math.exp(-both * window_s)) / (both * window_s)
        dispersion = 1 + 2 * share * (rates[1] - rates[0]) ** 2 / (both * 7.0) * grown
        error = 4 * math.sqrt(dispersion / 7.0 / window_s / windows * max(1, 2 / window_s))
        assert counts.mean() / window_s == pytest.approx(7.0, rel=error)
        assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.08)


def test_an_mmpp2_of_equal_levels_is_poisson() -> None:
    gaps_s = np.diff(mmpp2(20_000, 1.0), prepend=0) / 1e9
    assert stats.kstest(gaps_s, "expon", args=(0, 1 / 7)).pvalue > 0.01


def test_an_mmpp2_starts_in_its_stationary_state() -> None:
    first = np.array([mmpp2(1, 6.0, seed)[0] for seed in range(3000)]) / 1e9
    rates, _ = mmpp2_rates(7.0, 6.0, 0.2, 1e9)  # so slow that the first gap sees one state only
    slow = [
        mmpp2_arrivals_ns(7.0, 6.0, 0.2, 1e6, 1, generator(s, Stream.ARRIVALS), generator(s, Stream.STATES))[0] / 1e9
        for s in range(3000)
    ]
    expected = 0.8 / rates[0] + 0.2 / rates[1]
    assert np.mean(slow) == pytest.approx(expected, rel=0.08)
    assert first.mean() < expected


def test_a_longer_mmpp2_begins_with_the_same_arrivals() -> None:
    assert np.array_equal(mmpp2(5000, 3.0)[:100], mmpp2(100, 3.0))


def test_an_mmpp2_that_would_never_be_drawn_is_refused() -> None:
    streams = (generator(1, Stream.ARRIVALS), generator(1, Stream.STATES))
    with pytest.raises(ConfigError, match="the arrivals are as good as Poisson"):
        mmpp2_arrivals_ns(1.0, 3.0, 0.2, 1e-6, 10**6, *streams)
    with pytest.raises(ConfigError, match="too late"):
        mmpp2_arrivals_ns(1e-6, 3.0, 0.2, 2.0, 100, *streams)
    with pytest.raises(ConfigError, match="must be 1 or more"):
        mmpp2_arrivals_ns(1.0, 0.5, 0.2, 2.0, 100, *streams)


# ---- streams -------------------------------------------------------------------------------------


def hash_of(scenario: Scenario, path: Path) -> tuple[bytes, ...]:
    """Return what arrives in a scenario, as bytes."""
    world = build_world(scenario, path)
    arrays = (world.known.arrival_ps, world.known.prompt_tokens[:, 0], world.truth.output_tokens[:, 0])
    return tuple(np.ascontiguousarray(array).tobytes() for array in arrays)


def test_arrivals_and_lengths_do_not_depend_on_the_policy_or_the_number_of_instances() -> None:
    # C043
    scenario, path = load_scenario("quickstart")
    recipe = str(Path(__file__).resolve().parents[2] / "traces" / "recipes" / "quickstart.yaml")
    found = set()
    for policy in ("round_robin", "random"):
        for instances in (2, 3):
            data = scenario.model_dump()
            data["seed"] = 7
            data["workload"] = {"recipe": recipe}
            data["routing"]["policies"] = [policy]
            data["cluster"]["instances"] = data["cluster"]["instances"][:instances]
            found.add(hash_of(Scenario.model_validate(data), path))
    assert len(found) == 1


def test_the_arrivals_do_not_depend_on_the_lengths() -> None:
    # C043
    long = {"kind": "drawn", "prompt": {"median": 500, "sigma": 1}, "answer": {"median": 50, "sigma": 2}}
    mmpp = {"kind": "mmpp2", "rate_rps": 7.0, "ratio": 3.0}
    short_trace, long_trace = made(requests=50, arrivals=mmpp), made(requests=50, arrivals=mmpp, lengths=long)
    assert np.array_equal(short_trace.arrival_ns, long_trace.arrival_ns)
    assert not np.array_equal(short_trace.prompt_tokens, long_trace.prompt_tokens)


# ---- from files ----------------------------------------------------------------------------------


def recipe_beside(folder: Path, text: str) -> Recipe:
    (folder / "r.yaml").write_text(f"name: t\nseed: 7\n{text}")
    return load_recipe(folder / "r.yaml")


def test_the_arrivals_of_a_trace_are_replayed_with_a_rate_scale(tmp_path: Path) -> None:
    import_trace(FILES / "azure2024.csv", tmp_path / "a.parquet", ImportOptions())
    lengths = "lengths: {kind: drawn, prompt: {median: 5, sigma: 1}, answer: {median: 5, sigma: 1}}\n"
    trace = make_trace(recipe_beside(tmp_path, "arrivals: {kind: trace, file: a.parquet, rate_scale: 2}\n" + lengths))
    assert trace.arrival_ns.tolist() == [0, 125_000_000, 875_000_000, 937_500_000]
    assert "a.parquet sha256 " in trace.metadata["recipe_inputs"]
    assert "arrivals of a.parquet" in trace.metadata["source"]
    assert "licence" not in trace.metadata
    few = "requests: 2\narrivals: {kind: trace, file: a.parquet}\n" + lengths
    assert make_trace(recipe_beside(tmp_path, few)).arrival_ns.tolist() == [0, 250_000_000]
    many = "requests: 9\narrivals: {kind: trace, file: a.parquet}\n" + lengths
    with pytest.raises(ConfigError, match="has 4 arrivals, 9 are needed"):
        make_trace(recipe_beside(tmp_path, many))


def test_pairs_of_lengths_come_from_the_rows_of_a_file_without_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_bytes((FILES / "lengths.csv").read_bytes())
    text = "requests: {n}\nrate_rps: 1\nlengths: {{kind: file, file: l.csv, order: {order}}}\n"
    trace = make_trace(recipe_beside(tmp_path, text.format(n=3, order="file")))
    assert list(zip(trace.prompt_tokens, trace.output_tokens, strict=True)) == [(3, 2), (4, 5), (7, 8)]
    trace = make_trace(recipe_beside(tmp_path, text.format(n=300, order="drawn")))
    pairs, counts = np.unique(np.stack([trace.prompt_tokens, trace.output_tokens]), axis=1, return_counts=True)
    assert pairs.T.tolist() == [[3, 2], [4, 5], [7, 8]]
    assert counts.min() > 70
    with pytest.raises(ConfigError, match="has 3 pairs of lengths, 4 are needed"):
        make_trace(recipe_beside(tmp_path, text.format(n=4, order="file")))


@pytest.mark.parametrize("name", ["vllm_bench.json", "mooncake.jsonl", "burstgpt.csv", "azure2023.csv"])
def test_any_known_file_gives_pairs_of_lengths(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes((FILES / name).read_bytes())
    text = f"requests: 3\nrate_rps: 1\nlengths: {{kind: file, file: {name}, order: file}}\n"
    trace = make_trace(recipe_beside(tmp_path, text))
    import_trace(FILES / name, tmp_path / "t", ImportOptions())
    assert np.array_equal(trace.prompt_tokens, read_trace(tmp_path / "t").prompt_tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens,output_tokens\n1,x\n", "output_tokens, line 2: found 'x'; allowed is a whole number"),
        ("prompt_tokens,output_tokens\n1,-1\n", "output_tokens, line 2: found -1; allowed is 0 to"),
        ("prompt_tokens,output_tokens\n0,1\n", "found no row with both prompt and output tokens"),
        ("a,b\n0,1\n", "found no columns of prompt and output tokens among a, b"),
    ],
)
def test_bad_files_of_lengths_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        make_trace(recipe_beside(tmp_path, "requests: 1\nrate_rps: 1\nlengths: {kind: file, file: l.csv}\n"))


# ---- ServeGen ------------------------------------------------------------------------------------


def servegen(tmp_path: Path, rates: Path, lengths: Path, more: str = "", window: str = "[0, 1200]") -> Trace:
    return make_trace(
        recipe_beside(
            tmp_path,
            f"arrivals: {{kind: servegen, rates: {rates}, window_s: {window}}}\n"
            f"lengths: {{kind: servegen, lengths: {lengths}{more}}}\n",
        )
    )


def test_servegen_rates_give_as_many_requests_as_they_say() -> None:
    rates = read_rates(FILES / "servegen_rates.csv")
    arrivals, client, window_s = draw_arrivals(rates, (0.0, 1200.0), 1.0, generator(1, Stream.ARRIVALS))
    assert len(arrivals) == 30 + 60 + 12
    assert (np.diff(arrivals) >= 0).all()
    for number, start_s, count in ((0, 0.0, 30), (0, 600.0, 60), (1, 600.0, 12)):
        mine = arrivals[(client == number) & (window_s == start_s)] / 1e9
        assert len(mine) == count
        assert mine.min() >= start_s
        assert mine.max() <= start_s + 600
    arrivals, _, _ = draw_arrivals(rates, (300.0, 900.0), 100.0, generator(1, Stream.ARRIVALS))
    assert arrivals.min() >= 0
    assert arrivals.max() <= 600 * 10**9
    assert len(arrivals) == pytest.approx(100 * (15 + 30 + 6), rel=0.25)


def test_gaps_of_a_window_have_the_coefficient_of_variation_of_its_client() -> None:
    rates = read_rates(FILES / "servegen_rates.csv")
    arrivals, client, window_s = draw_arrivals(rates, (0.0, 1200.0), 1000.0, generator(1, Stream.ARRIVALS))
    weibull = math.sqrt(math.gamma(1 + 2 / 0.7) / math.gamma(1 + 1 / 0.7) ** 2 - 1)
    for number, start_s, cv in ((0, 0.0, 2.0), (0, 600.0, 1.0), (1, 600.0, weibull)):
        gaps = np.diff(arrivals[(client == number) & (window_s == start_s)])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_folder_of_the_original_gives_the_same_as_a_table() -> None:
    table, folder = read_rates(FILES / "servegen_rates.csv"), read_rates(FILES / "servegen")
    for name in ("client", "start_s", "rate_rps", "cv"):
        assert np.array_equal(getattr(table, name), getattr(folder, name))
    lengths = read_lengths(FILES / "servegen")
    assert lengths.keys() == read_lengths(FILES / "servegen_lengths.csv").keys() == {0}
    tokens, share = lengths[0][0.0]["input_tokens"]
    assert tokens.tolist() == [100, 200]
    assert share.tolist() == [0.5, 0.5]


def test_requests_of_clients_without_lengths_are_left_out_or_drawn_from_all_and_it_is_said(tmp_path: Path) -> None:
    rates, lengths = FILES / "servegen_rates.csv", FILES / "servegen_lengths.csv"
    trace = servegen(tmp_path, rates, lengths)
    assert len(trace) == 90
    assert set(trace.prompt_tokens.tolist()) == {100, 200}
    assert set(trace.output_tokens.tolist()) == {10}
    assert "12 requests of clients without lengths are left out" in trace.metadata["source"]
    trace = servegen(tmp_path, rates, lengths, ", without_lengths: pool")
    assert len(trace) == 102
    assert "12 requests of clients without lengths draw theirs from all clients" in trace.metadata["source"]


def test_servegen_lengths_go_with_any_arrivals(tmp_path: Path) -> None:
    text = f"requests: 50\nrate_rps: 1\nlengths: {{kind: servegen, lengths: {FILES / 'servegen_lengths.csv'}}}\n"
    trace = make_trace(recipe_beside(tmp_path, text))
    assert len(trace) == 50
    assert set(trace.prompt_tokens.tolist()) == {100, 200}


def test_the_window_of_a_servegen_trace_is_what_the_recipe_says(tmp_path: Path) -> None:
    rates, lengths = FILES / "servegen_rates.csv", FILES / "servegen_lengths.csv"
    assert len(servegen(tmp_path, rates, lengths, window="[0, 600]")) == 30
    with pytest.raises(ConfigError, match="no client has requests there"):
        servegen(tmp_path, rates, lengths, window="[5000, 6000]")
    with pytest.raises(ConfigError, match="must end after it starts"):
        servegen(tmp_path, rates, lengths, window="[600, 600]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,t_s\n0,1\n", "found no column rate_rps, only client, t_s"),
        ("0,0,-1,1,Gamma,1\n", "rate_rps, row 2: found '-1'; allowed is 0 or more"),
        ("0,0,1,nan,Gamma,1\n", "cv, row 2: found 'nan'; allowed is a finite number"),
        ("0,0,1,1,Pareto,1\n", "pattern, row 2: found 'pareto'; allowed is gamma or weibull"),
        ("0,0,1,1,Weibull,0\n", "p1, row 2: found '0'; allowed is a shape above 0.05"),
        ("x,0,1,1,Gamma,1\n", "client, row 2: found 'x'; allowed is a number"),
    ],
)
def test_bad_rates_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text if text.startswith("client") else "client,t_s,rate_rps,cv,pattern,p1\n" + text)
    with pytest.raises(SimclusterError, match=message):
        read_rates(path)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"found no chunk-N-trace\.csv"):
        read_rates(tmp_path)
    for text in ("{", "[]", '{"0": {"input_tokens": "{1: "}}', '{"0": {"input_tokens": 5}}', '{"x": {}}'):
        (tmp_path / "chunk-0-dataset.json").write_text(text)
        with pytest.raises(TraceError):
            read_lengths(tmp_path)
    (tmp_path / "chunk-0-trace.csv").write_text("1,2\n")
    with pytest.raises(TraceError, match="allowed is start,rate,cv,pattern,p1,p2"):
        read_rates(tmp_path)


def test_a_trace_from_files_is_written_and_read_back(tmp_path: Path) -> None:
    trace = servegen(tmp_path, FILES / "servegen_rates.csv", FILES / "servegen_lengths.csv")
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").equals(trace)
