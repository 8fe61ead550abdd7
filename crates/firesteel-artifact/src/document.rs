use crate::ArtifactError;
use fs_err as fs;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::io::Read;
use std::path::Path;

/// A kind of JSON file that this program writes and reads back: what it says it is in `format`, and
/// the `format_version` that is read.
#[derive(Debug, Clone, Copy)]
pub struct JsonFormat {
    /// The value of `format`.
    pub format: &'static str,
    /// The value of `format_version`.
    pub version: u32,
    /// Bytes of the longest file that is read.
    pub limit: u64,
    /// What it is, in an error: "the manifest of …".
    pub what: &'static str,
    /// How another version is mended.
    pub again: &'static str,
}

#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    format_version: Option<u32>,
}

impl JsonFormat {
    /// Whether `file` says that it is of this kind, of any version.
    pub fn is(&self, file: &Path) -> bool {
        let head = self.text(file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        head.is_some_and(|head: Head| head.format.as_deref() == Some(self.format))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it is missing, too large, or not of this kind and version.
    pub fn read<T: DeserializeOwned>(&self, file: &Path) -> Result<T, ArtifactError> {
        let problem = |problem: String| ArtifactError::Manifest { file: file.to_owned(), problem };
        let text = self.text(file)?;
        if text.len() as u64 > self.limit {
            return Err(problem(format!("is larger than {} bytes", self.limit)));
        }
        let parse = |error: serde_json::Error| problem(error.to_string());
        let head: Head = serde_json::from_slice(&text).map_err(parse)?;
        if head.format.as_deref() != Some(self.format) {
            return Err(problem(format!("is not {}", self.what)));
        }
        if head.format_version != Some(self.version) {
            let found = head.format_version.map_or("none".into(), |number| number.to_string());
            return Err(problem(format!(
                "format_version is {found}; this program reads {}; {}",
                self.version, self.again
            )));
        }
        serde_json::from_slice(&text).map_err(parse)
    }

    /// The file's text, or a byte more than is read.
    fn text(&self, file: &Path) -> std::io::Result<Vec<u8>> {
        let mut text = Vec::new();
        fs::File::open(file)?.take(self.limit + 1).read_to_end(&mut text)?;
        Ok(text)
    }
}
