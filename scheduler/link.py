"""One group of workers as the live driver deals with it: what it knows, and the commands of this turn."""

from __future__ import annotations

from scheduler.core import actions
from scheduler.interface import GroupClient, GroupCommand, ServedModel
from worker.protocol import AddModel, PageIn, RemoveModel


class GroupLink:
    """Collects a turn's commands and posts them at once, each model introduced before its first page-in."""

    def __init__(self, client: GroupClient) -> None:
        self.client = client
        self.up = False
        self._was_lost = False
        self._introduced: set[str] = set()  # models that the group's present workers were told of
        self._commands: list[GroupCommand] = []

    def send(self, command: GroupCommand) -> None:
        self._commands.append(command)

    def page_in(self, action: actions.PageIn, model: ServedModel) -> None:
        if action.model not in self._introduced:
            self._introduced.add(action.model)
            self.send(AddModel(action.model, model.path, model.identity))
        self.send(PageIn(action.model, action.first, action.last, action.epoch))

    def forget(self, model: str) -> None:
        if model in self._introduced:
            self._introduced.remove(model)
            self.send(RemoveModel(model))

    def came_up(self) -> bool:
        """Returns whether this was a restart."""
        self.up = True
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
