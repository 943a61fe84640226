"""The place under which hints and documents name the conversion of GGUF files."""

from radq.sources.gguf import convert_gguf as convert_gguf
