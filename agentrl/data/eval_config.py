"""slime's file of held-out sets (`--eval-config`), as settings.

    eval:
      defaults: {max_response_len: 16384, top_p: 0.7}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16}
        - {name: gpqa, path: gpqa.jsonl, rm_type: gpqa, input_key: question}

Format: slime's docs, "Multi-task evaluation".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.config import Spelling
from agentrl.data.eval_sets import EvalSet
from agentrl.errors import did_you_mean
from agentrl.runtime.extras import require
from agentrl.types import JSON

_RENAMED = {"rm_type": "reward", "custom_rm_path": "reward"}
_MOST_BYTES = 1 << 20


def in_file_as(key: str) -> Spelling:
    """Another name for a setting of held-out sets, which takes such a file."""
    text = f"Same as {key}, with the sets of a YAML file of slime's."
    return Spelling(text, lambda path, _: {key: sets_in(path)}, is_switch=False)


def sets_in(value: JSON) -> dict[str, JSON]:
    """The held-out sets of a file, each with its settings, by name.

    Raises:
        ValueError: it cannot be read, or is no such file; one sentence.
        MissingExtraError: YAML's parser is not installed.
    """
    require("eval_config", "yaml")
    path = Path(str(value))
    import yaml

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(
                f"eval_config: {path} has more than {_MOST_BYTES:,} bytes; name a YAML file of sets."
            )
        read: JSON = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(
            f"eval_config: {path} cannot be read ({error.strerror}); name a YAML file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"eval_config: {path} is not a YAML file ({reason}); mend that.") from None
    section = read.get("eval") if isinstance(read, dict) else None
    defaults = section.get("defaults") or {} if isinstance(section, dict) else None
    datasets = section.get("datasets") if isinstance(section, dict) else None
    if not (isinstance(defaults, dict) and isinstance(datasets, list) and datasets):
        raise ValueError(f"eval_config: {path} has no list `datasets` below `eval`; name the sets there.")
    named = [_named(path, defaults, each) for each in datasets]
    sets: dict[str, JSON] = dict(named)
    if len(sets) < len(named):
        raise ValueError(f"eval_config: two sets of {path} have one name; give every one a name of its own.")
    return sets


def _named(path: Path, defaults: Mapping[str, JSON], dataset: JSON) -> tuple[str, dict[str, JSON]]:
    """The name and the settings of a set."""
    if not (isinstance(dataset, dict) and isinstance(dataset.get("name"), str)):
        raise ValueError(f"eval_config: a set of {path} has no name; give every one a name and a path.")
    name, settings = str(dataset["name"]), dict[str, JSON]()
    for key, value in {**defaults, **dataset}.items():
        own = _RENAMED.get(key, key)
        if own in EvalSet.model_fields:
            settings[own] = "remote" if value == "remote_rm" else value
        elif key != "name":
            near = did_you_mean(key, EvalSet.model_fields)
            raise ValueError(
                f"eval_config: the set {name!r} of {path} has `{key}`, which is no setting of single sets "
                f"here; leave it out.{near}"
            )
    return name, settings
