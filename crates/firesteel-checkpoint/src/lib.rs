//! Hugging Face checkpoint folders and GGUF files as validated, memory-mapped models.
//!
//! [`Checkpoint::open`] reads config.json and one or several safetensors files, or a GGUF file,
//! checks everything against the architecture, and hands out [`Weight`]s that stay in the mapped
//! files until they are read. [`Checkpoint::random`] makes the same from a [`ModelConfig`] and a
//! seed; the published shapes are [`presets`]. [`write_checkpoint`], [`write_synthetic`] and
//! [`write_gguf`] write such folders and files.
//!
//! Every file is treated as hostile: nothing is allocated by a number that a file contains, names
//! of files are never followed out of the folder, links only where the Hugging Face cache has them
//! ([`file_in`]), and what is not understood is refused by name.
//!
//! # One description, two spellings
//!
//! config.json and the metadata of a GGUF file are two spellings of one description, which is
//! validated once as [`ModelConfig`]. What a [`Family`] has of its own is data, one file each in
//! `family/`: names in both spellings, accepted keys, the slots of a layer ([`SlotSpec`]: kind,
//! names, shape, what feeds it, what it feeds) and its maths ([`Block`]). What goes over weights
//! goes over slots, and only the forwards look at the block. Rotary embeddings are plain or
//! stretched by YaRN with a static factor ([`Yarn`]).
//!
//! Weights in blocks are widened as they are read, so everything downstream works on them. A model
//! takes other weights in the place of its own ([`Checkpoint::with_weights`]), from memory or
//! scaled when they are read.
//!
//! # Where files leave a choice
//!
//! - The head: the data win over `tie_word_embeddings`. Stored and different from the embedding is
//!   used (with a warning if the flag says tied), stored and identical is shared, absent with the
//!   flag false is an error.
//! - Where a family has one matrix of queries, keys and values, a folder may have separate ones,
//!   which are read as that one.
//!
//! # What is written
//!
//! [`write_gguf`] lays a file out and says what the format has no place for; it refuses a tokenizer
//! that the file would describe as another. The bytes of the tensors come from the caller
//! ([`EncodeRows`]): formats in blocks and their scales are chosen in firesteel-quantize. A
//! [`StagedFolder`] or [`StagedFile`] appears complete or not at all, and [`cache_root`] is the
//! folder for what can be made again.
//!
//! Only this crate maps files. What a changed file does is said at [`MappedFile`], and a program
//! can have itself told when a page of one is lost ([`watch_lost_pages`]).

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
mod os;
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
pub use os::write_all_at;
pub use random::RandomWeights;
pub use staged::{Replace, StagedFile, StagedFolder, remove_staged};
pub use weight::Weight;
pub use write::{Progress, SyntheticOptions, WriteOptions, write_checkpoint, write_synthetic};
