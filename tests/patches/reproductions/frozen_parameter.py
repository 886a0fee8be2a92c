"""`from_pretrained` trains parameters that their class freezes, such as Whisper's positions.

python frozen_parameter.py
"""

import tempfile

from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    vocab_size=64,
    d_model=48,
    encoder_layers=1,
    decoder_layers=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
model = WhisperForConditionalGeneration(config)
directory = tempfile.mkdtemp()
model.save_pretrained(directory)
loaded = WhisperForConditionalGeneration.from_pretrained(directory)
thawed = [
    name
    for name, parameter in model.named_parameters()
    if loaded.get_parameter(name).requires_grad and not parameter.requires_grad
]
assert not thawed, f"from_pretrained has made frozen parameters trainable, such as {thawed[0]}"
