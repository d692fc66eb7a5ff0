"""A client's choice among the models of its own round (FedIG's appendix A.2).

Its model is tried every few steps on validation images of its own, and the best one is what it
sends and remembers.
"""

import torch

from feddg.clients.client import Client
from feddg.errors import ClientError
from feddg.messages import Weights


class BestOfSteps:
    """Keeps the best of a client's models, tried every ``train.select_every`` steps and at the end.

    The model predicts by itself, in evaluation mode: under its own running statistics. Of equally
    good ones the first counts. A client whose share of the validation images is empty sends its
    last model.

    Raises:
        ClientError: nobody set validation images aside for the client.
    """

    def __init__(self, client: Client) -> None:
        if client.examples.validation is None:
            raise ClientError(
                "it has no validation images to choose its model by; leave train.select_every out"
            )
        self._client, self._validation = client, client.examples.validation
        self._every = client.worker.train.select_every or 1
        self._steps = 0
        self._best: tuple[float, Weights] | None = None

    def step(self) -> None:
        """Counts a step, and tries the model when it is time."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._try()

    def restore(self) -> None:
        """Puts the best model into the client's network."""
        if self._steps % self._every:
            self._try()
        if self._best is not None:
            self._client.network.load_state_dict(self._best[1])

    def _try(self) -> None:
        accuracy = self._accuracy()
        if accuracy is None or (self._best is not None and accuracy <= self._best[0]):
            return
        state = self._client.network.state_dict()
        self._best = accuracy, {name: tensor.detach().clone() for name, tensor in state.items()}

    def _accuracy(self) -> float | None:
        """Returns the share of the validation images it recognises, or None without any."""
        if not len(self._validation):
            return None
        client, correct = self._client, 0
        client.network.eval()
        with torch.no_grad():
            for batch in client.plain_batches(examples=self._validation):
                correct += int((client.network(batch.images).argmax(1) == batch.labels).sum())
        client.set_training()
        return correct / len(self._validation)
