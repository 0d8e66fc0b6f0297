"""Supervised fine-tuning in the form of TRL's example scripts."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    args=SFTConfig(
        "Qwen2.5-0.5B-SFT",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=2.0e-5,
        num_train_epochs=1,
        max_length=2048,
        packing=True,
        assistant_only_loss=True,
        weight_decay=0.01,
        save_strategy="epoch",
        seed=3,
    ),
)
trainer.train()
