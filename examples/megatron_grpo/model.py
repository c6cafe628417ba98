"""The policy: a Llama-shaped megatron-core GPTModel, its optimizer, and its export to Hugging Face names."""

import argparse
import copy
import hashlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import task
from attention import CoreAttention
from cpu_backend import known
from engines import LlamaShape


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    experts = {}
    if args.experts:
        experts = {
            "num_moe_experts": args.experts,
            "expert_model_parallel_size": args.ep,
            "moe_token_dispatcher_type": "allgather",  # the all-to-all one needs CUDA streams
            "moe_router_load_balancing_type": "none",
            "moe_router_topk": 2,
        }
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=2 * args.hidden,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        context_parallel_size=args.cp,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,  # token means over the whole batch, whatever the layout
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **experts,
    )


def llama_shape(config: TransformerConfig) -> LlamaShape:
    return LlamaShape(
        vocab_size=task.VOCAB_SIZE,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        max_position_embeddings=task.SEQ_LENGTH,
        rms_norm_eps=config.layernorm_epsilon,
    )


def build_model(config: TransformerConfig, seed: int) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or one for each virtual pipeline stage), wrapped in megatron-core's DDP."""
    spec = copy.deepcopy(get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm"))
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    # Tensor-parallel ranks must draw the same numbers (each keeps its slice of the whole); stages and experts differ.
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    torch.manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + expert_rank)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        where = {}
        if config.virtual_pipeline_model_parallel_size:
            # Releases before 0.13 know the stage by this, later ones by the arguments.
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            where = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=task.VOCAB_SIZE,
            max_sequence_length=task.SEQ_LENGTH,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(
                **known(parallel_state.is_pipeline_first_stage, **where)
            ),
            post_process=parallel_state.is_pipeline_last_stage(**known(parallel_state.is_pipeline_last_stage, **where)),
            **known(GPTModel, vp_stage=where.get("vp_stage")),
        )
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0))
        chunks[-1].broadcast_params()
    return chunks


def build_optimizer(chunks: list[DistributedDataParallel], learning_rate: float) -> MegatronOptimizer:
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=learning_rate, weight_decay=0.0, adam_beta2=0.95, clip_grad=0.0), chunks
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return optimizer


def _tensor_parallel_shards(parameter: Tensor) -> list[Tensor]:
    if not getattr(parameter, "tensor_model_parallel", False):
        return [parameter]
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(shards, parameter.contiguous(), group=group)
    return shards


def _llama_layer(name: str, shards: list[Tensor], shape: LlamaShape) -> dict[str, Tensor]:
    """One parameter of a transformer layer under its Hugging Face name(s)."""
    match name.removesuffix(".weight"):
        case "input_layernorm":
            return {"input_layernorm": shards[0]}
        case "pre_mlp_layernorm":
            return {"post_attention_layernorm": shards[0]}
        case "self_attention.linear_proj":
            return {"self_attn.o_proj": torch.cat(shards, 1)}
        case "mlp.linear_fc2":
            return {"mlp.down_proj": torch.cat(shards, 1)}
        case "mlp.linear_fc1":  # each rank holds its part of the gate, then its part of the up projection
            gate, up = zip(*(shard.chunk(2) for shard in shards), strict=True)
            return {"mlp.gate_proj": torch.cat(gate), "mlp.up_proj": torch.cat(up)}
        case "self_attention.linear_qkv":  # for each query group: its queries, its key, its value
            queries = shape.num_attention_heads // shape.num_key_value_heads * shape.head_dim
            grouped = torch.cat(shards).view(shape.num_key_value_heads, -1, shape.hidden_size)
            parts = grouped.split([queries, shape.head_dim, shape.head_dim], 1)
            return {f"self_attn.{x}_proj": part.flatten(0, 1) for x, part in zip("qkv", parts, strict=True)}
    raise KeyError(f"no Hugging Face name for layer parameter {name}")


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


@torch.no_grad()
def export_weights(chunks: list[DistributedDataParallel], shape: LlamaShape) -> dict[str, Tensor]:
    """Collective over the model-parallel group: the whole model under Hugging Face names, on every rank, on the CPU."""
    weights = {}
    for chunk in chunks:
        layer_index = [layer.layer_number - 1 for layer in chunk.module.decoder.layers]
        for name, parameter in chunk.module.named_parameters():
            shards = _tensor_parallel_shards(parameter)
            if name in _OUTSIDE_LAYERS:
                weights[_OUTSIDE_LAYERS[name]] = torch.cat(shards)
                continue
            index, layer_name = name.removeprefix("decoder.layers.").split(".", 1)
            for key, value in _llama_layer(layer_name, shards, shape).items():
                weights[f"model.layers.{layer_index[int(index)]}.{key}.weight"] = value
    weights = {name: value.to("cpu", copy=True) for name, value in weights.items()}
    stages = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, weights, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: value for stage in stages for name, value in stage.items()}


def weights_digest(chunks: list[DistributedDataParallel]) -> str:
    """Collective: SHA-256 over every rank's parameters, bit for bit, in rank order."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
