//! One file a verb.

pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod check;
pub(crate) mod compile;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod profile;
pub(crate) mod quantize;
pub(crate) mod setup;
pub(crate) mod synth;
pub(crate) mod worker;
