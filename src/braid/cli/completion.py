"""Scripts that complete commands, options, files and config keys in a shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of

_BASH = """\
_braid() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case $word in
    -*)
      case $verb in
{options}
      esac
      COMPREPLY=($(compgen -W "$words" -- "$word"))
      return ;;
  esac
  case $verb in
    {with_keys})
      if [ "$COMP_CWORD" -gt 2 ]; then
        COMPREPLY=($(compgen -S = -W "{keys}" -- "$word"))
        if [ ${{#COMPREPLY[@]}} -gt 0 ] && type compopt >/dev/null 2>&1; then compopt -o nospace; fi
      fi ;;
  esac
}}
complete -o default -F _braid braid
"""
_ZSH = "autoload -U +X compinit bashcompinit\ncompinit\nbashcompinit\n"


def script(shell: str, verbs: Mapping[str, Sequence[str]], with_keys: Sequence[str]) -> str:
    """The script for bash, zsh or fish. `verbs` are the commands with their options; those `with_keys` take a
    config and then overrides of its keys. Sections in lists are completed as their first item."""
    leaves = [path for path, field in fields_of(RunConfig) if not sections_of(field)]
    keys = sorted({path.replace("[]", ".0") for path in leaves})
    if shell == "fish":
        return "".join(_fish(verbs, with_keys, keys))
    options = "\n".join(f'        {name}) words="{" ".join(known)}" ;;' for name, known in verbs.items())
    text = _BASH.format(
        verbs=" ".join(verbs), options=options, with_keys="|".join(with_keys), keys=" ".join(keys)
    )
    return (_ZSH if shell == "zsh" else "") + text


def _fish(verbs: Mapping[str, Sequence[str]], with_keys: Sequence[str], keys: Sequence[str]) -> list[str]:
    lines = [f"complete -c braid -n __fish_use_subcommand -f -a '{' '.join(verbs)}'\n"]
    for name, options in verbs.items():
        after = f"'__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c braid -n {after} -l {option[2:]}\n" for option in options if option[:2] == "--"
        ]
    words = " ".join(f"{key}=" for key in keys)
    lines.append(f"complete -c braid -n '__fish_seen_subcommand_from {' '.join(with_keys)}' -a '{words}'\n")
    return lines
