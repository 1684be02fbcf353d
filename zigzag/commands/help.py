"""The groups of train.py --help: the headings above the options in the source. So a fork's new
option is shown where it stands, and needs no line here."""

from typing import Any, Sequence

from zigzag.core.options import comments

IN_A_SCRIPT = ("All flags of train.py change this script's run, too: python train.py --help lists "
               "them")
LAST = ("python train.py --help all shows every flag; --model NAME --help adds those of the "
        "network of NAME")


def groups_of(plain: type, run: type, networks: Sequence[Any] = (), everything: bool = False
              ) -> dict[str, Sequence[str]]:
    """{group: names of options}, in the order of train.Config (`run`): its options and those of
    the plain decoder's configuration (`plain`), then the further options of these networks. Rare
    ones are left out, unless `everything` is asked for."""
    groups: dict[str, list[str]] = {}
    for wanted in (False, True) if everything else (False,):
        for cls, usual in ((run, "training"), (plain, "model")):
            for name, (_, group, is_rare) in comments(cls).items():
                if is_rare == wanted:
                    groups.setdefault(group or usual, []).append(name)
    shown = {*comments(plain), *comments(run)}
    for network in networks:
        own = [name for name in comments(network.config) if name not in shown]
        groups[f"options of the network {network.name}"] = own
        shown.update(own)
    return groups
