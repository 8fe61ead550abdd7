use crate::{ModelError, PathKind};
use firesteel_checkpoint::{Checkpoint, ModelConfig, preset, presets};
use std::path::Path;

/// A model's shape, and its weights where there are some.
#[derive(Debug)]
pub struct ModelShape {
    /// The shape.
    pub config: ModelConfig,
    /// The weights; `None` for a config alone.
    pub checkpoint: Option<Checkpoint>,
    /// What is odd about it.
    pub warnings: Vec<String>,
}

impl ModelShape {
    /// That of a checkpoint folder, a GGUF file, a config.json, or of what was made of a model, of
    /// which the config is read.
    ///
    /// # Errors
    /// When the path is none of these or what it holds is not understood.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if let PathKind::Checkpoint | PathKind::Gguf = PathKind::of(path)? {
            let checkpoint = Checkpoint::open(path)?;
            return Ok(Self {
                config: checkpoint.config().clone(),
                warnings: checkpoint.warnings().to_vec(),
                checkpoint: Some(checkpoint),
            });
        }
        let (config, warnings) = ModelConfig::open(path)?;
        Ok(Self { config, checkpoint: None, warnings })
    }

    /// The published shape of that name, or what is at that path.
    ///
    /// # Errors
    /// When it is neither, or as [`ModelShape::open`].
    pub fn named(name: &str) -> Result<Self, ModelError> {
        if let Some(config) = preset(name) {
            return Ok(Self { config, checkpoint: None, warnings: Vec::new() });
        }
        let path = Path::new(name);
        if !path.exists() {
            return Err(ModelError::Name { name: name.into(), known: presets().join(", ") });
        }
        Self::open(path)
    }
}
