"""Weight sync: sends the policy's weights to engines in other processes.

    trainer rank 0: Sender ──bytes, bucket by bucket──> Receiver: engine 0
                           └──────────────────────────> Receiver: engine 1

The trainer opens a sender for a set of named engines and passes its ticket (plain data, JSON-serialisable) to
each engine's process, which opens a receiver with it. Then, once per round and in both processes at the same
time:

    options = SendOptions(transport="shared_memory", bucket_bytes=2**27, timeout_s=600)
    sender = open_sender(("rollout 0", "rollout 1"), options)    # on rank 0 of the trainer
    join_send(sender, version, backend.iter_weights())    # on every rank; `sender` is None on the others

    receiver = open_receiver(ticket, engine="rollout 0", timeout_s=...)
    engine.load_weights(version, receiver.receive(version))          # (name, tensor) pairs, or
    receiver.receive_into(version, dict(model.named_weights()))      # into tensors of the same names

Both yield or write a tensor only after its whole bucket has been verified (weights.fingerprint). Each side
raises an EngineError that names the fault or the peer that failed. Then both start over: the next `send`
waits for all its engines to reconnect, which receivers do by themselves. The receiving side needs only torch
and the standard library, and neither side needs Ray.
"""
