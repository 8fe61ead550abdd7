//! Proof tokens and the choice of an instruction set at run time.

use crate::KernelError;
use crate::simd::{Kernel, Simd};

/// The variable that forces an instruction set.
const VARIABLE: &str = "FIRESTEEL_ISA";

/// Plain code, which every CPU runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scalar;

/// Proof that this CPU has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The proof, if this CPU and its operating system have all three.
    #[must_use]
    pub fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

/// Proof that this CPU has AVX-512 F, BW, DQ, VL and VNNI, and all that [`Avx2`] stands for.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512Vnni(());

#[cfg(target_arch = "x86_64")]
impl Avx512Vnni {
    /// The proof, if this CPU and its operating system have all of them.
    #[must_use]
    pub fn new() -> Option<Self> {
        (Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni"))
        .then_some(Self(()))
    }

    /// What else it proves.
    pub(crate) fn avx2(self) -> Avx2 {
        Avx2(())
    }
}

/// Proof that this CPU has NEON with the dot product instructions.
#[cfg(target_arch = "aarch64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neon(());

#[cfg(target_arch = "aarch64")]
impl Neon {
    /// The proof, if this CPU has both.
    #[must_use]
    pub fn new() -> Option<Self> {
        (std::arch::is_aarch64_feature_detected!("neon")
            && std::arch::is_aarch64_feature_detected!("dotprod"))
        .then_some(Self(()))
    }
}

/// The instruction set that kernels use, with the proof that this CPU has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// `scalar`
    Scalar(Scalar),
    /// `avx2`
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// `avx512vnni`
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    /// `neon`
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
}

impl Isa {
    /// Every instruction set that this CPU has, the best one last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Scalar(Scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::new().map(Self::Avx2));
            all.extend(Avx512Vnni::new().map(Self::Avx512Vnni));
        }
        #[cfg(target_arch = "aarch64")]
        all.extend(Neon::new().map(Self::Neon));
        all
    }

    /// The one that FIRESTEEL_ISA names, or the best.
    ///
    /// # Errors
    ///
    /// The variable names what does not exist or what this CPU lacks.
    pub fn detect() -> Result<Self, KernelError> {
        match std::env::var_os(VARIABLE) {
            None => Self::named(None),
            Some(value) => Self::named(Some(&value.to_string_lossy())),
        }
    }

    /// The one of that name, or the best of this CPU.
    ///
    /// # Errors
    ///
    /// The name does not exist or this CPU lacks it.
    pub fn named(name: Option<&str>) -> Result<Self, KernelError> {
        let available = Self::available();
        let Some(name) = name else {
            return Ok(available.last().copied().unwrap_or(Self::Scalar(Scalar)));
        };
        available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| KernelError::Isa {
            value: name.to_owned(),
            available: available.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The name by which FIRESTEEL_ISA chooses it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar(_) => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => "avx512vnni",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
        }
    }

    /// Runs a kernel compiled for this instruction set.
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Scalar(simd) => simd.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(simd) => simd.vectorize(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => simd.vectorize(kernel),
        }
    }
}
