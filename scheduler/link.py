"""One group of workers as the live driver deals with it: what it knows, and the commands of this turn."""

from __future__ import annotations

from scheduler.core import actions
from scheduler.interface import GroupClient, GroupCommand, ServedModel
from worker.protocol import AddModel, PageIn, RemoveModel


class GroupLink:
    """Collects a turn's commands and posts them at once, each model introduced before its first page-in.

    Models are introduced as soon as both are there, so that workers can get ready for what may be asked of them.
    """

    def __init__(self, client: GroupClient) -> None:
        self.client = client
        self.up = False
        self._was_lost = False
        self._mesh = (1, 1)  # ranks, and pipeline stages that they make
        self._introduced: set[str] = set()  # models that the group's present workers were told of
        self._commands: list[GroupCommand] = []

    def send(self, command: GroupCommand) -> None:
        self._commands.append(command)

    def introduce(self, model: ServedModel) -> None:
        """Tell the workers of a model, if they are up, can run it, and do not know it."""
        fits = (len(model.page_hashes), model.pp) == self._mesh
        if self.up and fits and model.name not in self._introduced:
            self._introduced.add(model.name)
            self.send(AddModel(model.name, model.path, model.identity))

    def page_in(self, action: actions.PageIn, model: ServedModel) -> None:
        self.introduce(model)
        self.send(PageIn(action.model, action.first, action.last, action.epoch))

    def forget(self, model: str) -> None:
        if model in self._introduced:
            self._introduced.remove(model)
            self.send(RemoveModel(model))

    def came_up(self, ranks: int, pp: int) -> bool:
        """Returns whether this was a restart."""
        self.up = True
        self._mesh = (ranks, pp)
        return self._was_lost

    def lost(self) -> None:
        """The workers are gone, and with them what they knew. This turn's commands so far were meant for them."""
        self.up = False
        self._was_lost = True
        self._introduced.clear()
        self._commands.clear()

    def post(self) -> None:
        if self._commands:
            commands, self._commands = self._commands, []
            self.client.post(commands)
