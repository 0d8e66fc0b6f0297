"""GRPO in the form of TRL's example scripts."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NUM_GENERATIONS = 8


def main():
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    training_args = GRPOConfig(
        output_dir=f"runs/grpo-{MODEL}",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_generations=NUM_GENERATIONS,
        num_iterations=2,
        max_completion_length=2 * 512,
        temperature=0.9,
        beta=0.001,
        epsilon_high=0.28,
        loss_type="dr_grpo",
        scale_rewards=False,
        mask_truncated_completions=True,
        reward_weights=[1.0, 0.5],
        logging_steps=10,
        log_completions=True,
        save_steps=8,
        num_train_epochs=1,
        model_init_kwargs={"dtype": "float32"},
    )
    training_args.seed = 7
    trainer = GRPOTrainer(
        model=MODEL,
        args=training_args,
        reward_funcs=[accuracy_reward, think_format_reward],
        train_dataset=dataset,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
