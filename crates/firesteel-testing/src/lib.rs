//! What tests of several crates share: where the golden files are, numbers that look random, folders
//! compared, steps and decoders without a model. Only ever a development dependency.
//!
//! ```
//! use firesteel_testing::{Numbers, snr};
//! let reference: Vec<f64> = Numbers::new(1).units(64).iter().map(|v| f64::from(*v)).collect();
//! assert!(snr(&reference, &Numbers::new(1).units(64)).is_infinite());
//! ```

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper is a failed test")]

mod files;
#[cfg(feature = "steps")]
mod golden;
mod measure;
mod numbers;
#[cfg(feature = "steps")]
mod steps;

pub use files::{contents, copy_folder, golden_path, names, repository, spark_tiny_path};
#[cfg(feature = "steps")]
pub use golden::Golden;
pub use measure::{snr, widened};
pub use numbers::Numbers;
#[cfg(feature = "steps")]
pub use steps::{ScriptedDecoder, advance, values};
