"""The place under which documents name the folder of the embedded base model."""

from radq.sources.embedded import base_folder as base_folder
