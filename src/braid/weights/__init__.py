"""Publishing the policy's weights to engines in other processes.

    trainer rank 0: Sender ──bytes, bucket by bucket──> Receiver: engine 0
                           └──────────────────────────> Receiver: engine 1

The trainer opens a sender for engines that it knows by name, and its ticket (plain data, JSON-able) is handed to each
engine's process, which opens a receiver with it. Then, once a round and in both processes at the same time:

    options = SendOptions(transport="shared_memory", bucket_bytes=2**27, timeout_s=600)
    sender = open_sender(("rollout 0", "rollout 1"), options)         # on rank 0 of the trainer
    join_send(sender, version, backend.iter_weights())                # on every rank; `sender` is None on the others

    receiver = open_receiver(ticket, engine="rollout 0", timeout_s=...)
    engine.load_weights(version, receiver.receive(version))          # an engine that copies what it is given, or
    receiver.receive_into(version, dict(model.named_weights()))      # straight into tensors of the same names

`receive` gives a tensor only after its whole bucket has been checked against the sender's fingerprints (weights.fingerprint);
`receive_into` checks each tensor as it arrives. Both raise EngineError for a damaged, missing, swapped or old tensor, and for a
trainer that died or does not answer in time; `send` raises EngineError that names the engine which failed. After an error both
sides start over: the next `send` waits for all its engines to connect again, which a receiver does by itself.

An engine in the trainer's own process shares its tensors: nothing is sent (`choose_transport` says None).

The receiving side needs torch and the standard library alone, and neither side needs Ray:

    transports.py    which way is the cheapest for a placement
    wire.py          tickets, and the connection for small messages
    links.py         ways for bytes: a ring in shared memory or on a shared GPU, torch.distributed
    sender.py, receiver.py, sending.py (what all senders share)
    files.py         a folder of safetensors per version, for servers that read weights from disk
    fingerprint.py   what weights are compared by
"""
