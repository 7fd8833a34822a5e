"""Whether a folder holds a model, or adapters of one; told without transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ModelLoadError, RecordError
from agentrl.runtime.files import check_fetched
from agentrl.runtime.ownership import read_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADAPTER_CONFIG: Final = "adapter_config.json"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
_MAX_BYTES = 1 << 20
# What changes nothing in W + scale B A, beside the fields of `AdapterConfig`.
_NEUTRAL = {
    *("auto_mapping", "exclude_modules", "layers_pattern", "layers_to_transform"),
    *("lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
}
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


class AdapterConfig(BaseModel):
    """The adapter_config.json of peft, as far as it says what a folder's low-rank adapters are.

    r: their rank. rank_pattern: other ranks, by names of matrices.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    peft_type: str
    base_model_name_or_path: str | None = None
    r: Annotated[int, Field(ge=1)]
    lora_alpha: int | Annotated[float, Field(allow_inf_nan=False)]
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_modules: str | list[str] | None = None
    task_type: str | None = None
    inference_mode: bool | None = None

    @property
    def unknown(self) -> str | None:
        """What it has beside plain low-rank adapters; None = nothing."""
        if self.peft_type.upper() != "LORA":
            return f"peft_type = {self.peft_type}"
        if self.bias != "none":
            return f"bias = {self.bias}"
        # Others change the matrix, too.
        if self.init_lora_weights not in _BEGINNINGS and self.init_lora_weights is not None:
            return f"init_lora_weights = {self.init_lora_weights}"
        more = {name for name, value in (self.model_extra or {}).items() if value}
        return next(iter(sorted(more - _NEUTRAL)), None)


def adapter_config(directory: Path) -> AdapterConfig | None:
    """What the adapters of a folder are; None = it holds a whole model, or nothing.

    Raises:
        ModelLoadError: its adapter_config.json is damaged, or of adapters that are no plain LoRA.
    """
    path = directory / ADAPTER_CONFIG
    if not path.exists():
        return None
    try:
        # Caches of downloads have links. A pipe is not waited for.
        data = read_file(path.resolve(), most=_MAX_BYTES)
        check_fetched([path], ModelLoadError)
        config = AdapterConfig.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise ModelLoadError(f"{path} is no configuration of adapters ({reason}); copy it again.") from None
    except (OSError, RecordError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again.") from None
    if (unknown := config.unknown) is not None:
        raise ModelLoadError(
            f"{path} has {unknown}, and only plain LoRA is read here; merge the adapters into their model "
            "with peft, and name that folder."
        )
    return config


def base_folder(directory: Path) -> Path:
    """The folder with the config and the weights of a model: of adapters their base model's, else its own.

    A base model is a folder of this machine, as the working directory sees it: nothing is downloaded.

    Raises:
        ModelLoadError: see `adapter_config`; or the folder has adapters, and their base model is not here.
    """
    config = adapter_config(directory)
    if config is None:
        return directory
    name = config.base_model_name_or_path or "no model"
    base, named = Path(name), f"base_model_name_or_path in {directory / ADAPTER_CONFIG}"
    if "\0" in name or not (base / "config.json").is_file():
        raise ModelLoadError(
            f"{directory} holds adapters of {name!r}, which is no folder with a config.json; download that "
            f"model, and write the path of its folder to {named}."
        )
    if (base / ADAPTER_CONFIG).exists():
        raise ModelLoadError(
            f"{directory} holds adapters of {base}, which holds adapters, too; merge those into their model "
            f"(`agentrl convert {base} OUT`), and write OUT to {named}."
        )
    return base


def holds_model(directory: Path) -> bool:
    """Whether a folder looks as if it holds a model, or adapters of one."""
    return any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def tokenizer_folder(directory: Path) -> Path:
    """The folder with the tokenizer of a model: of adapters that were saved without one, their base model's.

    Raises:
        ModelLoadError: see `base_folder`.
    """
    has_own = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return directory if has_own else base_folder(directory)


def has_config(directory: Path) -> bool:
    """Whether `check_has_config` finds nothing wrong."""
    try:
        check_has_config(directory)
    except ModelLoadError:
        return False
    return True


def check_has_config(directory: Path) -> None:
    """Check that a folder has the config of a model.

    Raises:
        ModelLoadError: it has none; the message says what to name.
    """
    if not (base_folder(directory) / "config.json").is_file():
        raise ModelLoadError(f"{directory} holds no config.json; {model_remedy(directory)}.")


def model_remedy(directory: Path) -> str:
    """What to name where a folder holds no model."""
    checkpoint = directory / "checkpoint"
    if holds_model(checkpoint):
        return f"it is a run, whose model is {checkpoint}"
    if not directory.parent.exists() and _HUB_ID.fullmatch(str(directory)):
        folder = Path("models") / directory.name
        return f"name a folder: download {directory} from the Hub into {folder}, and name that"
    return "name a Hugging Face model directory"
