"""How policies are written: the grammar, parameters, mistakes, folders."""

import pytest

from simcluster.errors import ConfigError
from simcluster.routers import base_policy, check_policy, folder_names
from simcluster.routers.names import PolicyName, parse


def plain(name: PolicyName) -> object:
    inner = None if name.inner is None else plain(name.inner)
    return (name.base, name.given) if inner is None else (name.base, name.given, inner)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sfs", ("sfs", {})),
        (" sfs ", ("sfs", {})),
        ("power_of_two:load=tokens,d=3", ("power_of_two", {"load": "tokens", "d": "3"})),
        ("power_of_two: load = tokens , d=3", ("power_of_two", {"load": "tokens", "d": "3"})),
        ("power_of_two(load=tokens,d=3)", ("power_of_two", {"load": "tokens", "d": "3"})),
        ("admission(sfs)", ("admission", {}, ("sfs", {}))),
        ("epsilon(shortest_queue,p=0.1)", ("epsilon", {"p": "0.1"}, ("shortest_queue", {}))),
        ("epsilon(shortest_queue):p=0.1", ("epsilon", {"p": "0.1"}, ("shortest_queue", {}))),
        ("epsilon(power_of_two:d=3,load=tokens)", ("epsilon", {}, ("power_of_two", {"d": "3", "load": "tokens"}))),
        ("epsilon(power_of_two:d=3):p=0.1", ("epsilon", {"p": "0.1"}, ("power_of_two", {"d": "3"}))),
        ("epsilon(power_of_two(d=3),p=0.1)", ("epsilon", {"p": "0.1"}, ("power_of_two", {"d": "3"}))),
        ("epsilon(admission(sfs),p=0.1)", ("epsilon", {"p": "0.1"}, ("admission", {}, ("sfs", {})))),
        ("admission(epsilon(random,p=1))", ("admission", {}, ("epsilon", {"p": "1"}, ("random", {})))),
        ("admission(epsilon(x:a=1,b=2):p=1)", ("admission", {}, ("epsilon", {"p": "1"}, ("x", {"a": "1", "b": "2"})))),
        ("dir/my.py:Mine", ("dir/my.py:Mine", {})),
        ("dir/my.py:Mine:a=1", ("dir/my.py:Mine", {"a": "1"})),
        ("a=b/my.py:Mine", ("a=b/my.py:Mine", {})),
        ("pkg.mod:Mine", ("pkg.mod:Mine", {})),
        ("epsilon(my.py:Mine,p=0.2)", ("epsilon", {"p": "0.2"}, ("my.py:Mine", {}))),
        ("epsilon(a=b/my.py:Mine,p=0.2)", ("epsilon", {"p": "0.2"}, ("a=b/my.py:Mine", {}))),
        ("epsilon(my.py:Mine:a=1):p=0.2", ("epsilon", {"p": "0.2"}, ("my.py:Mine", {"a": "1"}))),
    ],
)
def test_the_grammar(text: str, expected: object) -> None:
    assert plain(parse(text)) == expected


MISTAKES = {
    "shortest_que": "policy 'shortest_que' is unknown; did you mean shortest_queue?",
    "": "policy '' is unknown; known: round_robin, ",
    "epsilom(sfs)": "policy 'epsilom(sfs)': epsilom does not wrap a policy; did you mean epsilon?",
    "sfs(random)": "policy 'sfs(random)': sfs does not wrap a policy; known: admission, epsilon",
    "admission": "policy 'admission': name the inner policy, as in admission(shortest_queue)",
    "admission()": "policy 'admission()': name the inner policy, as in admission(shortest_queue)",
    "epsilon(p=0.1)": "policy 'epsilon(p=0.1)': name the inner policy, as in epsilon(shortest_queue)",
    "admission(shortest_que)": "policy 'shortest_que' is unknown; did you mean shortest_queue?",
    "admission(sfs": "policy 'admission(sfs': parentheses do not match; write WRAPPER(POLICY) or POLICY:key=value",
    "admission(sfs))": "policy 'admission(sfs))': parentheses do not match; write WRAPPER(POLICY) or POLICY:key=value",
    "a(b)(c)": "policy 'a(b)(c)': parentheses do not match; write WRAPPER(POLICY) or POLICY:key=value",
    "power_of_two:lod=tokens": "policy 'power_of_two:lod=tokens': power_of_two has no parameter 'lod'; "
    "did you mean load?",
    "sfs:x=1": "policy 'sfs:x=1': sfs has no parameter 'x'; known: margin, cut",
    "power_of_two:x=1": "policy 'power_of_two:x=1': power_of_two has no parameter 'x'; known: d, load",
    "power_of_two:d=0": "policy 'power_of_two:d=0': d = 0; must be at least 1",
    "power_of_two:d=2.5": "policy 'power_of_two:d=2.5': d = 2.5; must be a whole number",
    "power_of_two:load=token": "policy 'power_of_two:load=token': load = token; must be one of requests, tokens, "
    "predicted_ttft",
    "power_of_two:d=2,d=3": "policy 'power_of_two:d=2,d=3': d is given twice",
    "power_of_two:d=2,load": "policy 'power_of_two:d=2,load': found 'load'; parameters are key=value, separated by "
    "commas",
    "power_of_two:d=": "policy 'power_of_two:d=': found 'd='; parameters are key=value, separated by commas",
    "epsilon(sfs,p=2)": "policy 'epsilon(sfs,p=2)': p = 2; must be from 0 to 1",
    "epsilon(sfs,p=nan)": "policy 'epsilon(sfs,p=nan)': p = nan; must be a number",
    "epsilon(power_of_two:d=2,p=0.1)": "policy 'power_of_two:d=2,p=0.1': power_of_two has no parameter 'p'; "
    "known: d, load",
    "admission(ewma_latency:alpha=0)": "alpha = 0; must be above 0 and at most 1",
    "ewma_latency:explore=-1": "policy 'ewma_latency:explore=-1': explore = -1; must be from 0 to 1",
    "session_hash:places=0": "policy 'session_hash:places=0': places = 0; must be at least 1",
    "prefix_hash:factor=0.9": "policy 'prefix_hash:factor=0.9': factor = 0.9; must be at least 1",
    "prefix_hash:tokens=0": "policy 'prefix_hash:tokens=0': tokens = 0; must be at least 1",
    "cache_aware:cache_threshold=1.5": "cache_threshold = 1.5; must be from 0 to 1",
    "weighted_scorers:kv=-1": "policy 'weighted_scorers:kv=-1': kv = -1; must be 0 or more",
    "weighted_scorers:token_threshold=0": "token_threshold = 0; must be at least 1",
    "kv_cost:scale=-1": "policy 'kv_cost:scale=-1': scale = -1; must be 0 or more",
    "kv_cost:temperature=-0.1": "temperature = -0.1; must be 0 or more",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_policy(text)
    assert MISTAKES[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_policy_inside_wrappers_and_parameters_can_be_told() -> None:
    assert base_policy("epsilon(admission(oracle),p=0.1)") == "oracle"
    assert base_policy("power_of_two:d=3") == "power_of_two"


def test_folder_names_are_safe_readable_and_different() -> None:
    given = [
        "sfs",
        "power_of_two:load=tokens,d=3",
        "power_of_two(load=tokens,d=3)",
        "admission(sfs)",
        "epsilon(shortest_queue,p=0.1)",
        "my.py:Mine",
        "/somewhere/else/my.py:Mine",
        "../my.py:Mine:a=1",
        "admission(../my.py:Mine)",
        "x" * 300,
        "../..",
    ]
    assert list(folder_names(given).values()) == [
        "sfs",
        "power_of_two_load=tokens,d=3",
        "power_of_two_load=tokens,d=3-2",
        "admission_sfs",
        "epsilon_shortest_queue,p=0.1",
        "my.py_Mine",
        "my.py_Mine-2",
        "my.py_Mine_a=1",
        "admission_my.py_Mine",
        "x" * 100,
        "policy",
    ]
