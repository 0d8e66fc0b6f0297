"""First number of every random key, so that no two uses draw the same."""

TRAIN_KEY, EVAL_KEY, BATCH_KEY, CHOICE_KEY, COPY_KEY, JUDGE_KEY = 0, 1, 2, 3, 4, 5
