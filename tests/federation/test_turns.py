"""What a client does in a round, whatever carries the messages."""

import torch

from feddg.clients.client import Client
from feddg.federation.turns import train
from feddg.methods.base import Method
from feddg.models.precision import autocast
from feddg.settings import TrainSettings
from federations import SmallFederation


def test_mixed_precision_sees_the_weights_of_the_last_step():
    """A context around the whole round must train as one opened afresh for every step."""
    settings = TrainSettings(batch_size=4, local_epochs=3, lr=0.01)
    federation = SmallFederation(Method(), sizes=(24,), train=settings)
    worker, start = federation.worker, federation.server.state.weights
    worker.threads = None  # as many as the loop by hand has
    worker.autocast = autocast("bfloat16", torch.device("cpu"))

    def client() -> Client:
        return Client(0, federation.examples(0), worker, round=1, received=start)

    trained = {n: t.clone() for n, t in train(client(), Method()).weights.items()}

    by_hand = client()
    worker.network.load_state_dict(start)
    by_hand.set_training()
    optimizer = torch.optim.Adam(worker.network.parameters(), settings.lr, fused=True)
    for batch in by_hand.batches():
        with torch.autocast("cpu", torch.bfloat16):
            logits = worker.network(batch.images)
            loss = torch.nn.functional.cross_entropy(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in worker.network.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=0, msg=name)
