//! Hugging Face checkpoint folders and GGUF files as validated, memory-mapped models.
//!
//! [`Checkpoint::open`] reads config.json and one or several safetensors files, or a GGUF file,
//! checks everything against the architecture, and hands out [`Weight`]s that stay in the mapped
//! files until they are read. [`Checkpoint::random`] makes the same from a [`ModelConfig`] and a seed, and
//! [`write_checkpoint`] and [`write_synthetic`] write such a folder.
//!
//! Every file is treated as hostile: nothing is allocated by a number that a file contains, names
//! of files are never followed out of the folder, and what is not understood is refused by name.

pub mod blocks;
mod cache;
mod checkpoint;
mod config;
mod error;
mod family;
mod folder;
mod gguf;
mod json;
mod map;
mod mistaken;
mod random;
mod safetensors;
mod staged;
mod weight;
mod write;

pub use blocks::WeightFormat;
pub use cache::{cache_root, cache_root_of};
pub use checkpoint::{Checkpoint, CheckpointFile, Head, LayerWeights};
pub use config::{LayerKind, ModelConfig, Rope, Yarn};
pub use error::CheckpointError;
pub use family::{
    Activation, AttentionBlock, Block, Family, FedBy, Feeds, Half, MlpBlock, PreTokenizer, Size,
    Slot, SlotKind, SlotSpec, preset, presets,
};
pub use folder::file_in;
pub use gguf::{
    EncodeRows, Gguf, GgufArray, GgufEntry, GgufLayout, GgufRows, GgufTensor, GgufTokenizer,
    GgufValue, GgufWritten, write_gguf,
};
pub use map::{FileIdentity, MappedFile, watch_lost_pages};
pub use mistaken::mistaken_file;
pub use random::RandomWeights;
pub use staged::{Replace, StagedFile, StagedFolder, remove_staged};
pub use weight::Weight;
pub use write::{Progress, SyntheticOptions, WriteOptions, write_checkpoint, write_synthetic};
