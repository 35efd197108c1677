"""The planned models with what only some pipelines pass to them or build them with, for `tiny_models.make`."""

import diffusers
import torch
from diffusers.models.transformers import transformer_flux, transformer_flux2
from tiny_models import SMALL, VIDEO, chronoedit, flux, flux2, helios, ltx, ltx2, qwenimage, video_inputs


def holes(rows):
    """Return a mask (2, rows) with holes; the second of the batch has no keys at its end, a whole rank of them."""
    mask = torch.ones(2, rows, dtype=torch.bool)
    mask[0, 1::3] = mask[1, -5:] = mask[1, 0] = False
    return mask


def rows_of(inputs, name="hidden_states"):
    return inputs[name].shape[1]


def with_residuals(made, randn, *names):
    """Add residuals of a ControlNet for every layer."""
    model, inputs = made
    rows = rows_of(inputs)
    return model, inputs | {name: [randn(2, rows, 64) for _ in range(2)] for name in names}


def flux_controlnet(randn, uneven):
    return with_residuals(flux(randn, uneven), randn, "controlnet_block_samples", "controlnet_single_block_samples")


def qwenimage_controlnet(randn, uneven):
    return with_residuals(qwenimage(randn, uneven), randn, "controlnet_block_samples")


def flux_ip_adapter(randn, uneven):
    """Image rows attend to the rows of a prompt's picture as well, which are whole on every rank."""
    model, inputs = flux(randn, uneven)
    for block in model.transformer_blocks:
        block.attn.set_processor(transformer_flux.FluxIPAdapterAttnProcessor(64, 10, num_tokens=(3,), scale=0.7))
    return model, inputs | dict(joint_attention_kwargs=dict(ip_hidden_states=[randn(2, 3, 10)]))


def flux_lora(randn, uneven):
    """Adapters are all that is trained; one of them is behind the last gather."""
    from peft import LoraConfig

    model, inputs = flux(randn, uneven)
    model.add_adapter(LoraConfig(r=3, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False))
    assert not model.x_embedder.weight.requires_grad
    return model, inputs


def flux2_kv(randn, uneven):
    """The processors that may keep keys and values, which nothing asks to keep any."""
    model, inputs = flux2(randn, uneven)
    for blocks, processor in (
        (model.transformer_blocks, transformer_flux2.Flux2KVAttnProcessor),
        (model.single_transformer_blocks, transformer_flux2.Flux2KVParallelSelfAttnProcessor),
    ):
        for block in blocks:
            block.attn.set_processor(processor())
    return model, inputs


def chronoedit_tokens(randn, uneven):
    model, inputs = chronoedit(randn, uneven)
    return model, inputs | dict(timestep=torch.arange(75 if uneven else 32)[None] % 11)


def ltx_tokens(randn, uneven):
    model, inputs = ltx(randn, uneven)
    rows = rows_of(inputs)
    return model, inputs | dict(timestep=torch.arange(2 * rows).view(2, rows) % 11)


def ltx2_tokens(randn, uneven):
    model, inputs = ltx2(randn, uneven)
    rows = rows_of(inputs)
    timestep = torch.arange(2.0 * rows).view(2, rows) % 11
    return model, inputs | dict(timestep=timestep, audio_timestep=torch.arange(18.0).view(2, 9) % 5)


def qwenimage_holes(randn, uneven):
    model, inputs = qwenimage(randn, uneven)
    return model, inputs | dict(encoder_hidden_states_mask=holes(rows_of(inputs, "encoder_hidden_states")))


def ltx_holes(randn, uneven):
    model, inputs = ltx(randn, uneven)
    return model, inputs | dict(encoder_attention_mask=holes(rows_of(inputs, "encoder_hidden_states")))


def ltx2_holes(randn, uneven):
    """Masks of both texts."""
    model, inputs = ltx2(randn, uneven)
    masks = {
        name.replace("hidden_states", "attention_mask"): holes(rows_of(inputs, name))
        for name in ("encoder_hidden_states", "audio_encoder_hidden_states")
    }
    return model, inputs | masks


def ltx2_self_mask(randn, uneven):
    """Weights between the rows of the video."""
    model, inputs = ltx2(randn, uneven)
    rows = rows_of(inputs)
    return model, inputs | dict(video_self_attention_mask=1 - randn(2, rows, rows).abs() * 2e-4)


def ltx2_guidance(randn, uneven):
    """One block skips its attention for one of the batch, and streams that meet nowhere."""
    model, inputs = ltx2(randn, uneven)
    return model, inputs | dict(
        spatio_temporal_guidance_blocks=[1], perturbation_mask=torch.tensor([0.0, 1.0]), isolate_modalities=True
    )


def qwenimage_two_pictures(randn, uneven):
    """A picture to edit beside the one that is drawn, whose rows have another timestep."""
    model = diffusers.QwenImageTransformer2DModel(
        **SMALL,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        zero_cond_t=True,
    )
    _, inputs = qwenimage(randn, uneven)
    pictures = [(1, 3, 5), (1, 2, 5)] if uneven else [(1, 2, 4), (1, 2, 4)]
    return model, inputs | dict(img_shapes=[pictures] * 2)


def wan_picture(randn, uneven):
    """Cross-attention to a picture too; the model counts on 512 rows of text behind it."""
    model = diffusers.WanTransformer3DModel(**VIDEO, rope_max_seq_len=32, image_dim=10, added_kv_proj_dim=48)
    inputs = video_inputs(randn, uneven)
    return model, inputs | dict(encoder_hidden_states=randn(1, 512, 16), encoder_hidden_states_image=randn(1, 5, 10))


def helios_of(layers, **more):
    def made(randn, uneven):
        model = diffusers.HeliosTransformer3DModel(**VIDEO | dict(num_layers=layers), rope_dim=(4, 4, 4), **more)
        return model, helios(randn, uneven)[1]

    return made


VARIATIONS = {
    f.__name__: f
    for f in (
        flux_controlnet,
        flux_ip_adapter,
        flux_lora,
        flux2_kv,
        wan_picture,
        chronoedit_tokens,
        qwenimage_controlnet,
        qwenimage_holes,
        qwenimage_two_pictures,
        ltx_holes,
        ltx_tokens,
        ltx2_holes,
        ltx2_tokens,
        ltx2_self_mask,
        ltx2_guidance,
    )
} | {"helios1": helios_of(1), "helios3": helios_of(3), "helios3_amplified": helios_of(3, is_amplify_history=True)}
