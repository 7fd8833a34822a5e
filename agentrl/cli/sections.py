"""--help of a command with hundreds of settings: the most used ones, or those of a section."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import rich_click as click
from click import Context
from rich_click.utils import OptionGroupDict

from agentrl.cli.commands import Command
from agentrl.config import Section, others_of
from agentrl.errors import ConfigError, did_you_mean

ALL = "all"
_HELP = ("--help", "-h")
MOST_USED = (
    *("env", "env_kwargs", "prompt_data", "reward", "tools", "hf_checkpoint"),
    *("name", "output_dir", "seed", "n", "temperature", "split", "openai_url", "openai_model"),
    *("warm_start_steps", "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "max_turns"),
    *("rollout_max_context_len", "max_staleness", "advantage_estimator", "correction", "lr", "trainer"),
    *("engine", "eval_interval", "eval_episodes", "sft_data", "sft_lr", "num_epoch"),
)
"""The settings that most runs set; a command shows those that it has."""


class SettingsCommand(Command):
    """A command whose settings are flags, in sections: --help, --help SECTION and --help all.

    sections: the names of the settings by section. variants: of those that one variant alone has, that one
    (`correction = tis`), under which they are shown. tree: of which they are. `config_flags` fills all three.
    """

    sections: Mapping[str, Sequence[str]] = {}
    variants: Mapping[str, str] = {}
    tree: type[Section] | None = None

    @property
    def others(self) -> Mapping[str, str]:
        """Settings of other tools, each with what to do in place of it."""
        return {} if self.tree is None else others_of(self.tree)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments; a word after --help is a section.

        Raises:
            ConfigError: there is no such section, or a flag is one of another tool.
        """
        if not ctx.resilient_parsing:
            self._refuse_others(args)
        place = next((index for index, word in enumerate(args) if word in _HELP), None)
        if place is None or ctx.resilient_parsing:
            self._shown({name for names in self.sections.values() for name in names})
            return super().parse_args(ctx, args)
        section = next(iter(args[place + 1 : place + 2]), "")
        self._show("" if section.startswith("-") else section)
        return super().parse_args(ctx, ["--help"])

    def _refuse_others(self, args: Sequence[str]) -> None:
        """Answer all flags of other tools at once: whoever brings a script has many of them."""
        own = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        unknown = [flag for flag in dict.fromkeys(given) if flag not in own]
        by_flag = {flag_of(name): text for name, text in self.others.items()} if unknown else {}
        foreign = [flag for flag in unknown if flag in by_flag]
        if len(foreign) == 1:
            raise ConfigError(f"{foreign[0]} is a flag of other tools: {by_flag[foreign[0]]}")
        if foreign:
            lines = "".join(f"\n  {flag}: {by_flag[flag]}" for flag in foreign)
            raise ConfigError(f"{len(foreign)} flags are of other tools; in place of each:{lines}")

    def _show(self, section: str) -> None:
        """Choose what --help shows. section: "" = the most used settings."""
        if section not in ("", ALL, *self.sections):
            near = did_you_mean(section, self.sections)
            raise ConfigError(f"--help {section}: there is no such section.{near} {self._listed()}")
        everything = {name for names in self.sections.values() for name in names}
        if section == "":
            shown = [name for name in MOST_USED if name in everything]
            panels = {"most used settings": shown}
        else:
            panels = {}
            for own, names in self.sections.items():
                for name in names if section in (ALL, own) else ():
                    variant = self.variants.get(name)
                    panels.setdefault(own if variant is None else f"{own}: {variant}", []).append(name)
        self._shown({name for names in panels.values() for name in names})
        groups: list[OptionGroupDict] = [
            {"name": name, "options": [flag_of(setting) for setting in names]}
            for name, names in panels.items()
        ]
        click.rich_click.OPTION_GROUPS[f"* {self.name}"] = groups
        self.epilog = self._listed() if section == "" else None

    def _shown(self, names: Collection[str]) -> None:
        for option in self.params:
            if isinstance(option, click.Option) and any(
                option.name in some for some in self.sections.values()
            ):
                option.hidden = option.name not in names

    def _listed(self) -> str:
        number = sum(map(len, self.sections.values()))
        return (
            f"All {number} settings: --help {ALL}, or one section of them, such as --help rollout: "
            f"{', '.join(self.sections)}. `agentrl settings WORD` searches them."
        )


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
