"""What this project adds inside a Hugging Face decoder: attention over packed rows and over slot caches."""

from manus_fast.modeling.attention import output_head, packed_hidden, use_packed_attention

__all__ = ["output_head", "packed_hidden", "use_packed_attention"]
