"""DPO in the form of TRL's example scripts."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model_id = "Qwen/Qwen2-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
dataset = load_dataset("trl-lib/ultrafeedback_binarized")

training_args = DPOConfig(
    output_dir="Qwen2-0.5B-DPO",
    learning_rate=5.0e-7,
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    beta=0.2,
    loss_type=["sigmoid", "sft"],
    loss_weights=[1.0, 0.1],
    warmup_steps=5,
    eval_strategy="steps",
    eval_steps=50,
    logging_steps=25,
    gradient_checkpointing=False,
    report_to="none",
)
trainer = DPOTrainer(
    model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)
trainer.train()
