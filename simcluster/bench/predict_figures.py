"""What routers pay for a prediction: features of a prompt and both heads, for all models at once."""

from simcluster.bench.measure import Measured, cpu_s
from simcluster.predict.beliefs import ROOM
from simcluster.predict.predictor import load_predictor
from simcluster.shipped import find_file
from simcluster.workload.synth import load_recipe, make_trace

__all__ = ["prediction"]

_PREDICTOR, _RECIPE = "synthetic-mix", "quickstart-prompts"
_CHARACTERS = 400


def prediction(quick: bool) -> Measured:
    """Time the shipped predictor on one request after the other, qualities and answer lengths of its models [us].

    Every prompt is another one, so that neither caches nor branches get used to it.
    """
    predictor = load_predictor(find_file(_PREDICTOR, ROOM, ".json"))
    models = [each.name for each in predictor.models]
    predict = predictor.for_models(models)
    trace = make_trace(load_recipe(find_file(_RECIPE, "traces/recipes", ".yaml")))
    texts = [] if trace.prompt is None else trace.prompt.tolist()
    prompts = [text[:_CHARACTERS] for text in texts if len(text) >= _CHARACTERS]
    prompts = prompts[: 50 if quick else 1000]

    def predict_all() -> None:
        for prompt in prompts:
            predict(prompt, None)

    predict_all()
    values = tuple(cpu_s(predict_all) / len(prompts) * 1e6 for _ in range(9))
    return Measured(values, f"9 x {len(prompts):,} prompts of {_CHARACTERS} characters, {len(models)} models")
