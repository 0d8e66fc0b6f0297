"""First element of every random key, one per use, so that no two uses share random numbers."""

TRAIN_KEY, EVAL_KEY, BATCH_KEY, CHOICE_KEY, COPY_KEY, JUDGE_KEY, REPLAY_KEY = 0, 1, 2, 3, 4, 5, 6
